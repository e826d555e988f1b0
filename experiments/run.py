"""An experiment from its data to results: train, score the test records, calibrate, write model and report.

Each stage keeps what it has in the folder of the run, so that a run can be cut anywhere, for instance into pieces of
ten minutes (`--pause-after 9m`, then `--resume` until results.json is there).
"""

from __future__ import annotations

import fcntl
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
from deformer_stream.model.deformer import DEformer
from experiments.experiment import TEST, Data, Experiment, Preset, Scored, changed
from experiments.options import ExperimentSettings
from experiments.report import page
from experiments.score import in_orders
from trainer import checkpoint
from trainer.budget import Budget, Costs
from trainer.calibrate import calibrate
from trainer.data import CALIBRATION, TRAIN, VALIDATION, PreparedTable
from trainer.evaluate import held_out
from trainer.fit import Status, TrainingResult, TrainingRun

MODEL, SCORING, RESULTS = "model", "scoring", "results.json"
TIMED_RECORDS = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """directory: of the run. results: what results.json says."""

    directory: Path
    results: dict[str, Any]


def run(
    experiment: Experiment,
    settings: ExperimentSettings,
    *,
    say: Callable[[str], None] = lambda line: None,
    observe: Callable[[Status], None] = lambda status: None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run or continue the whole of it. say: told what happens. observe: told every training step.

    Raises errors of `deformer_stream.errors`, and `trainer.fit.Interrupted` when `stop` says so, to be continued.
    """
    device = model_store.device_named(settings.device)
    preset = changed(experiment.presets[settings.preset], settings.override)
    with _held(settings.out):
        state = _earlier_run(settings)
        data = experiment.load(settings.data, preset, settings.seed)
        fit = start(data.prepared, preset, settings, device)
        if state is not None:
            fit.restore(state)
            say(f"continuing at step {fit.step} of {fit.steps}")
        say(f"{parameters(fit.model):,} parameters, {len(fit.rows):,} records to train on, {device}")
        fitted = fit.run(stop, observe, lambda model: Costs(0.0, _seconds_per_record(model, fit)))
        rows = test_rows(data, settings)
        say(f"scoring {len(rows):,} test records in {settings.orders} orders")
        scores = in_orders(
            fitted.model, data.prepared, rows, settings.orders, settings.seed, settings.out / SCORING, stop
        )
        nll = scores.nll + data.correction[rows]
        training = _training(experiment, preset, settings, data, fit, fitted, device)
        training["test"] = _summary(nll, len(data.prepared.select_rows(TEST)))
        history = _corrected(fitted.history, float(data.correction[fit.validation_rows].mean()))
        say("drawing the report")
        blocks, further = experiment.report(
            Scored(fitted.model, data, rows, nll, scores.per_feature.mean(0), history, training, stop, settings.seed)
        )
        results = training | further | {"history": history}
        _write(experiment, settings, data, fitted, results, page(experiment, results, blocks))
    return Outcome(settings.out, results)


def start(data: PreparedTable, preset: Preset, settings: ExperimentSettings, device: torch.device) -> TrainingRun:
    """The training run, not yet begun."""
    torch.manual_seed(settings.seed)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    model = DEformer(data.schema, preset.model).to(device)
    identity = {"the data's fingerprint": data.fingerprint, "seed": settings.seed, "max_time": settings.max_time}
    identity |= preset.to_json()
    return TrainingRun(data, model, preset.recipe, settings.seed, settings.out, Budget(settings.max_time), identity)


def parameters(model: DEformer) -> int:
    return sum(p.numel() for p in model.parameters())


def test_rows(data: Data, settings: ExperimentSettings) -> NDArray[np.int64]:
    """All test records, or a random choice of `--test-records`, ascending."""
    rows = data.prepared.select_rows(TEST)
    if settings.test_records is None or settings.test_records >= len(rows):
        return rows
    chosen = np.random.default_rng([settings.seed, 0x7E57]).permutation(len(rows))[: settings.test_records]
    return rows[np.sort(chosen)]


@contextmanager
def _held(out: Path) -> Iterator[None]:
    """The folder of the run, held by this process alone."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written ({error.strerror}); choose another place") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--out {out}: another run is at work there; wait or choose another name") from None
        yield


def _earlier_run(settings: ExperimentSettings) -> dict[str, Any] | None:
    state = checkpoint.load_state(settings.out)
    if state is not None and not settings.resume:
        raise ConfigError(
            f"{settings.out} holds a run (step {state['step']} of {state['steps']}): add --resume to continue it, "
            "or choose another folder"
        )
    return state


def _seconds_per_record(model: DEformer, fit: TrainingRun) -> float:
    """Measured on a few validation records in one order; the first pass of a GPU would mislead."""
    rows = fit.validation_rows[:TIMED_RECORDS]
    held_out(model, fit.data, rows, 1, 0)
    began = fit.budget.clock()
    held_out(model, fit.data, rows, 1, 0)
    return (fit.budget.clock() - began) / len(rows)


def _training(
    experiment: Experiment,
    preset: Preset,
    settings: ExperimentSettings,
    data: Data,
    fit: TrainingRun,
    fitted: TrainingResult,
    device: torch.device,
) -> dict[str, Any]:
    """What was trained, on what, for how long."""
    split = data.prepared.split
    sizes = {"train": TRAIN, "validation": VALIDATION, "calibration": CALIBRATION, "test": TEST}
    gpu = device.type == "cuda"
    return {
        "experiment": experiment.name,
        "preset": settings.preset,
        "hyperparameters": preset.to_json(),
        "parameters": parameters(fitted.model),
        "records": {name: int((split == part).sum()) for name, part in sizes.items()},
        "fingerprint": data.prepared.fingerprint,
        "seed": settings.seed,
        "steps": fitted.steps,
        "records_seen": fitted.steps * fit.batch,
        "epochs": round(fitted.epochs, 3),
        "stopped_early": fitted.stopped_early,
        "seconds": round(fit.history[-1]["seconds"], 1),
        "device": torch.cuda.get_device_name(device) if gpu else f"CPU ({platform.machine()})",
        "threads": torch.get_num_threads(),
    }


def _summary(nll: NDArray[np.float64], total: int) -> dict[str, Any]:
    """nll: (orders, N). The standard error is that of a mean over records drawn anew, each in the same orders."""
    records = nll.mean(0)
    return {
        "nll": float(nll.mean()),
        "standard_error": float(records.std(ddof=1) / np.sqrt(len(records))) if len(records) > 1 else None,
        "by_order": nll.mean(1).tolist(),
        "orders": len(nll),
        "records": nll.shape[1],
        "of": total,
        "unit": "nats",
    }


def _corrected(history: list[dict[str, float]], nats: float) -> list[dict[str, float]]:
    return [row | {"train": row["train"] + nats, "validation": row["validation"] + nats} for row in history]


def _write(
    experiment: Experiment,
    settings: ExperimentSettings,
    data: Data,
    fitted: TrainingResult,
    results: dict[str, Any],
    document: str,
) -> None:
    """The model directory with its report, then results.json, whose presence says that the run is complete."""
    calibration = calibrate(fitted.model, data.prepared, data.prepared.select_rows(CALIBRATION), "random", settings.seed)
    model_store.write(settings.out / MODEL, fitted.model, calibration, results, document)
    partial = settings.out / (RESULTS + ".partial")
    partial.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
    partial.replace(settings.out / RESULTS)
