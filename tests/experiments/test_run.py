"""A run on a synthetic power table: its output, and that interruptions do not change its results."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deformer_stream
from deformer_stream.errors import ConfigError, InputError
from deformer_stream.model.deformer import DEformer
from experiments import run as runner
from experiments import score
from experiments.binarized_mnist.data import make_pixel_schema
from experiments.binarized_mnist.experiment import PRESETS as IMAGE_PRESETS
from experiments.command import run_command
from experiments.experiment import apply_overrides
from experiments.power.experiment import EXPERIMENT, PRESETS
from experiments.run import Outcome
from tests.experiments.worlds import TINY, settings, write_power
from trainer.data import Split
from trainer.evaluate import evaluate_held_out
from trainer.fit import EVALUATIONS, Interrupted, TrainingStatus

SHORT = TINY + ",batch=32,mixtures=4"
TIMES = ("seconds",)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_power(tmp_path_factory.mktemp("power") / "household_power_consumption.txt", 700)


def run(table: Path, out: Path, epochs: int = 3, **given: Any) -> Outcome:
    rest = {k: given.pop(k) for k in ("should_stop", "observe_step") if k in given}
    options = {"preset": "small", "override": f"{SHORT},epochs={epochs}", "orders": 3} | given
    return runner.run_experiment(EXPERIMENT, settings(out, table, **options), **rest)


def remove_durations(results: dict[str, Any]) -> dict[str, Any]:
    """Return results without durations."""
    history = [{k: v for k, v in row.items() if k not in TIMES} for row in results["history"]]
    return {k: v for k, v in results.items() if k not in TIMES} | {"history": history}


@pytest.fixture(scope="module")
def uninterrupted_run(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(table, tmp_path_factory.mktemp("uninterrupted_run"))


@pytest.mark.charts
def test_run_writes_results_model_and_report(uninterrupted_run: Outcome, table: Path) -> None:
    results = json.loads((uninterrupted_run.directory / "results.json").read_text())
    assert results == uninterrupted_run.results
    assert (results["test"]["records"], results["test"]["of"], results["test"]["orders"]) == (68, 68, 3)
    np.testing.assert_allclose(np.mean(results["test"]["by_order"]), results["test"]["nll"])
    assert results["history"][-1]["validation"] < results["history"][0]["validation"] - 1
    detector = deformer_stream.load(uninterrupted_run.directory / "model")
    page = (uninterrupted_run.directory / "model" / "report.html").read_text()
    assert "cannot be compared" in page  # 686 rows are not the table
    assert not re.search(r"(?<!\d)0\.68(?!\d)", page)
    # Scoring reading by reading gives the log-likelihood of the complete record.
    data = EXPERIMENT.load_data(table, PRESETS["small"], 0)
    row = data.prepared.values[data.prepared.select_rows(Split.TEST)[0]].astype(float)
    raw = detector.schema.denormalise(np.arange(6), row)
    scorer = detector.scorer(alpha=0.05)
    order = [3, 1, 0, 5, 4, 2]
    for code in order:
        update = scorer.update("r", detector.schema.names[code], float(raw[code]))
    model = detector.artifact.model
    expected = model.log_prob(torch.tensor([order]), torch.tensor(row[order])[None].float()).sum().item()
    assert abs(update.running_log_likelihood - expected) < 1e-3


def test_result_is_the_mean_over_orders_in_published_units(uninterrupted_run: Outcome, table: Path) -> None:
    """Scoring again in other orders gives the same result within the spread over orders."""
    detector = deformer_stream.load(uninterrupted_run.directory / "model")
    data = EXPERIMENT.load_data(table, PRESETS["small"], 0)
    rows = data.prepared.select_rows(Split.TEST)
    again = (
        evaluate_held_out(detector.artifact.model, data.prepared, rows, 10, 99).mean_nll + data.correction[rows].mean()
    )
    by_order = np.array(uninterrupted_run.results["test"]["by_order"])
    assert abs(again - by_order.mean()) < 4 * by_order.std(ddof=1) + 1e-3


@pytest.mark.parametrize("optimizer", ["muon", "adamw", "adam"])
def test_interrupted_run_gives_bitwise_equal_results(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """The run is interrupted twice in training, then in scoring after every second piece."""
    monkeypatch.setattr(score, "READINGS_PER_PIECE", 100)
    override = f"{SHORT},epochs=3,optimizer={optimizer},dropout=0.1"
    uncut = run(table, tmp_path / "uninterrupted_run", override=override)
    cuts = iter([7, 20])
    pieces = 0
    while not (tmp_path / "parts" / "results.json").exists():
        pieces += 1
        assert pieces < 20
        until = next(cuts, None)
        seen = [0, 0]  # the step, and the number of calls of `stop` since then

        def observe(status: TrainingStatus, seen: list[int] = seen) -> None:
            seen[:] = [status.step, 0]

        def stop(seen: list[int] = seen, until: int | None = until) -> bool:
            seen[1] += 1
            return seen[0] >= until if until else seen[1] > 2

        torch.rand(3)  # other code may draw random numbers between two parts
        try:
            run(table, tmp_path / "parts", override=override, resume=pieces > 1, should_stop=stop, observe_step=observe)
        except Interrupted:
            continue
    assert pieces > 4
    parts = json.loads((tmp_path / "parts" / "results.json").read_text())
    assert remove_durations(parts) == remove_durations(uncut.results)
    weights = [
        (tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("uninterrupted_run", "parts")
    ]
    assert weights[0] == weights[1]


def test_existing_run_is_not_overwritten(uninterrupted_run: Outcome, table: Path) -> None:
    with pytest.raises(ConfigError, match="add --resume"):
        run(table, uninterrupted_run.directory)
    with pytest.raises(ConfigError, match="epochs was 3, now it is 4"):
        run(table, uninterrupted_run.directory, epochs=4, resume=True)


def test_paused_run_continues_until_complete(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--pause-after` and `--resume` are repeated until there are results, and each part makes progress."""
    out = tmp_path / "out"
    given = {
        "preset": "small",
        "override": f"{TINY},batch=200,epochs=2,tokens=single",
        "orders": 2,
        "pause_after": 1e-3,
    }
    num_parts = 0
    while not (out / "results.json").exists():
        assert run_command(lambda: EXPERIMENT, settings(out, table, **given, resume=num_parts > 0)) == 0
        shown = capsys.readouterr()
        assert ("add --resume to continue" in shown.err) != (out / "results.json").exists()
        num_parts += 1
        assert num_parts < 20
    assert num_parts > 4
    assert "test NLL" in shown.out


@pytest.mark.parametrize("name", ["binarized_mnist", "power"])
def test_command_line_options_and_errors(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_module(*words: object) -> tuple[object, str, str]:
        """Return the exit code and the outputs of `python -m experiments.NAME`, which runs in this process."""
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        with pytest.raises(SystemExit) as end:
            runpy.run_module(f"experiments.{name}", run_name="__main__")
        return end.value.code, *capsys.readouterr()

    code, out, _ = run_module("--help")
    assert code == 0
    for word in ("--data", "--out", "--preset", "--max-time", "--pause-after", "--resume", "--orders", "arXiv"):
        assert word in out
    code, _, errors = run_module("--data", tmp_path, "--out", tmp_path / "out")
    assert code == 3
    assert len(errors.splitlines()) == 1
    assert run_module("--data", tmp_path, "--out", tmp_path / "out", "--preset", "huge")[0] == 2


def test_parts_of_the_split_have_different_codes() -> None:
    """Test records must not be taken for records that are left out."""
    assert len({int(part) for part in Split.__members__.values()}) == len(Split.__members__)
    assert Split.TEST != Split.LEFT_OUT


def test_presets_do_not_depend_on_the_defaults_of_the_trainer() -> None:
    """Held-out likelihood is best without noise on the readings, and Muon trains faster than AdamW."""
    for presets in (PRESETS, IMAGE_PRESETS):
        assert {preset.recipe.smoothing for preset in presets.values()} == {0.0}
        assert [presets[name].recipe.optimizer for name in ("paper", "default", "small")] == ["adam", "muon", "muon"]


def test_overrides_change_the_preset() -> None:
    preset = apply_overrides(PRESETS["small"], "d_model=32, hidden=64+128,batch=7,optimizer=adam,waves=,norm=post")
    assert (preset.model.d_model, preset.model.hidden, preset.model.norm) == (32, (64, 128), "post")
    assert (preset.recipe.batch, preset.recipe.optimizer, preset.waves) == (7, "adam", ())
    assert apply_overrides(PRESETS["small"], "") == PRESETS["small"]
    for text, words in [
        ("width=3", "there is no 'width'"),
        ("batch=many", "batch=many: .*integer"),
        ("norm=middle", "norm=middle"),
        ("d_model=33,heads=2", "not a multiple"),
    ]:
        with pytest.raises(ConfigError, match=words):
            apply_overrides(PRESETS["small"], text)


def test_report_shows_a_subset_of_test_records(table: Path, tmp_path: Path) -> None:
    outcome = run(table, tmp_path, epochs=1, test_records=10, orders=1)
    assert (outcome.results["test"]["records"], outcome.results["test"]["of"]) == (10, 68)
    assert "10 of 68" in (tmp_path / "model" / "report.html").read_text()


def test_time_limit_applies_to_training(table: Path, tmp_path: Path) -> None:
    """The limit ends the training, which uses it except for the time of the last validation, however slow that is."""
    outcome = run(table, tmp_path, epochs=100_000, max_time="3s", orders=1)
    assert outcome.results["seconds"] > 2.0
    assert outcome.results["epochs"] < 100_000


def test_paper_presets_have_the_published_settings() -> None:
    """About 19 million parameters, one image per step, Adam with a constant learning rate, the last weights."""
    images, power = IMAGE_PRESETS["paper"], PRESETS["paper"]
    assert 18.5e6 < runner.count_parameters(DEformer(make_pixel_schema(images.waves), images.model)) < 19.5e6
    assert (images.recipe.batch, images.recipe.learning_rate, images.waves) == (1, 1e-5, ())
    assert images.recipe.optimizer == power.recipe.optimizer == "adam"
    assert (power.model.mixtures, power.model.dropout, power.recipe.batch) == (150, 0.2, 128)
    assert images.model.memory == power.model.memory == "all"


def test_paper_preset_keeps_the_learning_rate_and_the_last_weights(table: Path, tmp_path: Path) -> None:
    data = EXPERIMENT.load_data(table, PRESETS["paper"], 0).prepared
    preset = apply_overrides(PRESETS["paper"], f"{SHORT},epochs=2,learning_rate=0.001")
    fit = runner.create_training_run(data, preset, settings(tmp_path, table), torch.device("cpu"))
    last = []
    fitted = fit.run(on_status=lambda status: last.append([p.detach().clone() for p in fit.model.parameters()]))
    assert {row["learning_rate"] for row in fitted.history} == {0.001}
    (optimizer,) = fit.optimizers
    assert isinstance(optimizer, torch.optim.Adam)
    assert any(
        all(torch.allclose(a, b) for a, b in zip(weights, fitted.model.parameters(), strict=True)) for weights in last
    )


def test_bfloat16_gives_nearly_the_same_loss_and_gradients(table: Path) -> None:
    """A GPU trains in bfloat16: the loss is equal within its precision, and the gradients have the same direction."""
    data = EXPERIMENT.load_data(table, PRESETS["small"], 0).prepared
    torch.manual_seed(0)
    model = DEformer(data.schema, PRESETS["small"].model)
    values = torch.from_numpy(data.values[data.select_rows(Split.TRAIN)[:64]])
    features = torch.rand(values.shape, generator=torch.Generator().manual_seed(0)).argsort(1)
    losses, gradients = [], []
    for narrow in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            loss = -model.log_prob(features, values.gather(1, features)).sum(1).mean()
        loss.backward()
        assert loss.dtype == torch.float32
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert abs(losses[0] - losses[1]) < 0.02 * abs(losses[0])
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99


@pytest.mark.data
@pytest.mark.slow
def test_sample_of_the_data_set_is_learned(data_dir: Path, tmp_path: Path) -> None:
    """The NLL decreases. For comparison, a Gaussian has 8.5 nats and independent histograms have about 3."""
    outcome = run(data_dir, tmp_path, override=f"{SHORT},epochs=12,batch=64", orders=2)
    assert np.isfinite(outcome.results["test"]["nll"])
    first, last = outcome.results["history"][0], outcome.results["history"][-1]
    assert last["validation"] < first["validation"] - 2
    assert outcome.results["test"]["nll"] < 6


def test_too_small_table_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too few to be split"):
        EXPERIMENT.load_data(write_power(tmp_path / "household_power_consumption.txt", 15), PRESETS["small"], 0)


def test_presets_never_stop_a_run_early() -> None:
    """The learning curve must be complete, so the presets run their whole schedule."""
    assert all(p.recipe.patience >= EVALUATIONS for p in [*PRESETS.values(), *IMAGE_PRESETS.values()])
