"""Run an experiment: train a model, score the test records, calibrate, and write the model with its report.

Each stage saves its progress in the folder of the run. So a run can be interrupted at any time and continued, for
example in parts of ten minutes with `--pause-after 9m` and `--resume`, until results.json exists.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deformer_stream import model_store
from deformer_stream.errors import ConfigError
from deformer_stream.file_lock import open_locked
from deformer_stream.model.deformer import DEformer
from experiments.experiment import Experiment, ExperimentData, Preset, ScoredRun, apply_overrides
from experiments.options import ExperimentSettings
from experiments.report import render_report
from experiments.score import score_in_orders
from trainer import checkpoint
from trainer.budget import NO_COSTS, Costs, TimeBudget
from trainer.calibrate import calibrate
from trainer.data import PreparedTable, Split
from trainer.evaluate import evaluate_held_out
from trainer.fit import TrainingResult, TrainingRun, TrainingStatus, should_use_bfloat16

MODEL, SCORING, RESULTS = "model", "scoring", "results.json"
"""Names in the folder of a run: the model directory, the progress of scoring, and the results."""

NUM_TIMED_RECORDS = 16
"""Number of validation records on which the time to score one record is measured."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A complete run.

    Attributes:
        directory: Folder of the run.
        results: Content of results.json.
    """

    directory: Path
    results: dict[str, Any]


def run_experiment(
    experiment: Experiment,
    settings: ExperimentSettings,
    *,
    report_progress: Callable[[str], None] = lambda line: None,
    observe_step: Callable[[TrainingStatus], None] = lambda status: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run an experiment from the beginning, or continue it, to its end.

    Args:
        experiment: The experiment.
        settings: Its options.
        report_progress: Receives a line of text before each stage.
        observe_step: Receives the status of every training step.
        should_stop: Returns whether to save the progress and stop; it is called between steps.

    Raises:
        DeformerError: An option, a file or the folder of the run cannot be used.
        Interrupted: `should_stop` returned true. The run can be continued.
    """
    device = model_store.resolve_device(settings.device)
    preset = apply_overrides(experiment.presets[settings.preset], settings.override)
    with _lock_folder(settings.out):
        state = _load_previous_run(settings)
        data = experiment.load_data(settings.data, preset, settings.seed)
        training_run = create_training_run(data.prepared, preset, settings, device)
        if state is not None:
            training_run.restore(state)
            report_progress(f"continuing at step {training_run.step} of {training_run.steps}")
        num_parameters, num_rows = count_parameters(training_run.model), len(training_run.train_rows)
        report_progress(f"{num_parameters:,} parameters, {num_rows:,} records to train on, {device}")
        costs = NO_COSTS
        if training_run.budget.limit is not None and not training_run.has_measured_costs:
            costs = Costs(after=0.0, record=_measure_seconds_per_record(training_run))
        fitted = training_run.run(should_stop, observe_step, costs)
        rows = choose_test_rows(data, settings)
        report_progress(f"scoring {len(rows):,} test records in {settings.orders} orders")
        scores = score_in_orders(
            fitted.model,
            data.prepared,
            rows,
            settings.orders,
            settings.seed,
            settings.out / SCORING,
            should_stop,
            should_use_bfloat16(settings.precision, device),
        )
        nll = scores.nll + data.correction[rows]
        training = _summarize_training(experiment, preset, settings, data, training_run, fitted, device)
        training["test"] = _summarize_nll(nll, len(data.prepared.select_rows(Split.TEST)))
        mean_correction = float(data.correction[training_run.validation_rows].mean())
        history = _to_published_units(fitted.history, mean_correction)
        report_progress("drawing the report")
        per_feature = scores.per_feature.mean(0)
        blocks, further_results = experiment.make_report(
            ScoredRun(fitted.model, data, rows, nll, per_feature, history, training, should_stop, settings.seed)
        )
        results = training | further_results | {"history": history}
        _write_results(experiment, settings, data, fitted, results, render_report(experiment, results, blocks))
    return Outcome(settings.out, results)


def create_training_run(
    data: PreparedTable, preset: Preset, settings: ExperimentSettings, device: torch.device
) -> TrainingRun:
    """Return the training run of a new model; it has not started."""
    torch.manual_seed(settings.seed)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    model = DEformer(data.schema, preset.model).to(device)
    # A run is only continued if these are unchanged.
    identity = {"the data's fingerprint": data.fingerprint, "seed": settings.seed, "max_time": settings.max_time}
    identity |= preset.to_json()
    return TrainingRun(
        data,
        model,
        preset.recipe,
        settings.seed,
        settings.out,
        TimeBudget(settings.max_time),
        identity,
        validation_precision=settings.precision,
    )


def count_parameters(model: DEformer) -> int:
    """Return the number of weights of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


def choose_test_rows(data: ExperimentData, settings: ExperimentSettings) -> NDArray[np.int64]:
    """Return the row numbers of all test records, or of a random `--test-records` of them, ascending."""
    rows = data.prepared.select_rows(Split.TEST)
    if settings.test_records is None or settings.test_records >= len(rows):
        return rows
    chosen = np.random.default_rng([settings.seed, 0x7E57]).permutation(len(rows))[: settings.test_records]
    return rows[np.sort(chosen)]


@contextmanager
def _lock_folder(out: Path) -> Iterator[None]:
    """Create the folder of the run and hold a lock on it, so that two processes never use the same folder.

    Raises:
        ConfigError: The folder cannot be written or is in use.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = open_locked(out / "lock")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written ({error.strerror}); choose another folder") from None
    if lock is None:
        raise ConfigError(f"--out {out} is in use by another run; wait for its end or choose another folder")
    with lock:
        yield


def _load_previous_run(settings: ExperimentSettings) -> dict[str, Any] | None:
    """Return the saved state of an interrupted run, None if there is none.

    Raises:
        ConfigError: There is one, and `--resume` was not given.
    """
    state = checkpoint.load_state(settings.out)
    if state is not None and not settings.resume:
        raise ConfigError(
            f"{settings.out} contains a run (step {state['step']} of {state['steps']}): add --resume to continue it, "
            "or choose another folder"
        )
    return state


def _measure_seconds_per_record(training_run: TrainingRun) -> float:
    """Measure the seconds to score one record in one order with the averaged model.

    The first pass is not measured, because a GPU needs more time for it.
    """
    model, rows = training_run.averaged_model, training_run.validation_rows[:NUM_TIMED_RECORDS]
    evaluate_held_out(model, training_run.data, rows, 1, 0)
    started_at = training_run.budget.clock()
    evaluate_held_out(model, training_run.data, rows, 1, 0)
    return (training_run.budget.clock() - started_at) / len(rows)


def _summarize_training(
    experiment: Experiment,
    preset: Preset,
    settings: ExperimentSettings,
    data: ExperimentData,
    training_run: TrainingRun,
    fitted: TrainingResult,
    device: torch.device,
) -> dict[str, Any]:
    """Return the entries of results.json that describe the training: hyperparameters, data, duration and device."""
    split = data.prepared.split
    code_by_part = {
        "train": Split.TRAIN,
        "validation": Split.VALIDATION,
        "calibration": Split.CALIBRATION,
        "test": Split.TEST,
    }
    is_gpu = device.type == "cuda"
    return {
        "experiment": experiment.name,
        "preset": settings.preset,
        "hyperparameters": preset.to_json(),
        "parameters": count_parameters(fitted.model),
        "records": {part: int((split == code).sum()) for part, code in code_by_part.items()},
        "fingerprint": data.prepared.fingerprint,
        "seed": settings.seed,
        "steps": fitted.steps,
        "records_seen": fitted.steps * training_run.batch_size,
        "epochs": round(fitted.epochs, 3),
        "stopped_early": fitted.stopped_early,
        "seconds": round(training_run.history[-1]["seconds"], 1),
        "device": torch.cuda.get_device_name(device) if is_gpu else f"CPU ({platform.machine()})",
        "threads": torch.get_num_threads(),
    }


def _summarize_nll(nll: NDArray[np.float64], num_test_records: int) -> dict[str, Any]:
    """Return the test result as it is stored in results.json.

    The standard error is that of the mean over newly drawn records, each scored in as many orders.

    Args:
        nll: (orders, M) negative log-likelihood of M scored records in nats.
        num_test_records: Number of test records, scored or not.
    """
    nll_by_record = nll.mean(0)
    num_scored = len(nll_by_record)
    return {
        "nll": float(nll.mean()),
        "standard_error": float(nll_by_record.std(ddof=1) / np.sqrt(num_scored)) if num_scored > 1 else None,
        "by_order": nll.mean(1).tolist(),
        "orders": len(nll),
        "records": num_scored,
        "of": num_test_records,
        "unit": "nats",
    }


def _to_published_units(history: list[dict[str, float]], mean_correction: float) -> list[dict[str, float]]:
    """Add the mean correction, in nats, to the losses of each row of the training history."""
    return [
        row | {"train": row["train"] + mean_correction, "validation": row["validation"] + mean_correction}
        for row in history
    ]


def _write_results(
    experiment: Experiment,
    settings: ExperimentSettings,
    data: ExperimentData,
    fitted: TrainingResult,
    results: dict[str, Any],
    report: str,
) -> None:
    """Write the model directory with its report, then results.json.

    results.json is written last and at once, because it marks the run as complete.
    """
    calibration = calibrate(
        fitted.model, data.prepared, data.prepared.select_rows(Split.CALIBRATION), "random", settings.seed
    )
    model_store.write(settings.out / MODEL, fitted.model, calibration, results, report)
    partial = settings.out / (RESULTS + ".partial")
    partial.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
    partial.replace(settings.out / RESULTS)
