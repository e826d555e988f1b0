"""A training run from tables to a model directory: prepare, fit, calibrate, evaluate, write."""

from __future__ import annotations

import fcntl
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch

from deformer_stream import artifact
from deformer_stream.core.conformal import Calibration
from deformer_stream.core.model import PRESETS, DEformer, ModelConfig
from deformer_stream.errors import ConfigError
from trainer import checkpoint, gaussians
from trainer.calibrate import Order, calibrate, calibration_rows, choose_order, statistics
from trainer.data import CALIBRATION, TRAIN, DataOptions, Prepared, prepare
from trainer.evaluate import HeldOut, held_out
from trainer.fit import Budget, Costs, Fit, Fitted, Recipe, Status
from trainer.gaussians import Guides
from trainer.options import Everything, names
from trainer.ranking import EXEMPLARS, rank

HELD_OUT_ROWS, HELD_OUT_ORDERS = 2000, 4
TIMED_ROWS = 64


@dataclass(frozen=True, slots=True)
class Result:
    """What a finished run hands to report and summary."""

    directory: Path
    fingerprint: str
    data: Prepared
    model: DEformer
    fitted: Fitted
    calibration: Calibration
    held_out: HeldOut
    training: dict[str, Any]


class StopSignals:
    """While open, SIGINT and SIGTERM ask for a stop after the current step; a second one ends at once."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self.received != 0

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        signal.signal(number, self._before[number])


def train(
    tables: Sequence[Path],
    settings: Everything,
    *,
    show: Callable[[Prepared], None] = lambda data: None,
    observe: Callable[[Status], None] = lambda status: None,
    say: Callable[[str], None] = lambda line: None,
    stop: Callable[[], bool] = lambda: False,
    budget: Budget | None = None,
) -> Result:
    """Run the whole of it. show: told the kinds. observe: told every step. say: told what happens, in words.

    Raises errors of `deformer_stream.errors`, and `fit.Interrupted` when `stop` says so.
    """
    from trainer.report import render

    budget = budget or Budget(settings.max_time)
    device = artifact.device_named(settings.device)
    with _working_folder(settings.out) as folder:
        state = _earlier_run(folder, settings)
        data = prepare(tables, _data_options(settings), folder)
        show(data)
        order = choose_order(settings.order, data)
        guides = gaussians.fit(data, choose_gaussians(settings), settings.seed)
        config = replace(model_config(settings), gaussians=guides.components if guides else 0)
        recipe = choose_recipe(settings, int((data.split == TRAIN).sum()))
        model = _new_model(data, config, guides, settings.seed, device)
        identity = _identity(settings, data, config, recipe)
        fit = Fit(data, model, recipe, settings.seed, folder, budget, identity, guides)
        if state is not None:
            fit.restore(state)
            say(f"continuing at step {fit.step} of {fit.steps}")
        elif settings.resume:
            say(f"nothing to resume in {folder}: starting from the beginning")
        rows = data.rows(CALIBRATION)
        fitted = fit.run(stop, observe, lambda model: _costs(model, data, budget, order))
        say("calibrating")
        calibration = calibrate(fitted.model, data, rows, order, settings.seed)
        model = rank(fitted.model, data, choose_exemplars(settings), settings.seed)
        held = held_out(
            fitted.model, data, calibration_rows(rows, settings.seed, HELD_OUT_ROWS), HELD_OUT_ORDERS, settings.seed + 1
        )
        training = _summary(settings, data, recipe, fitted, held, budget, str(device))
        page = render(data, fitted, calibration, held, training)
        fingerprint = artifact.write(settings.out, model, calibration, training, page)
        shutil.rmtree(folder)
    return Result(settings.out, fingerprint, data, model, fitted, calibration, held, training)


@contextmanager
def _working_folder(out: Path) -> Iterator[Path]:
    """`DIR.training`, held by this process alone. It stays where the run does not finish."""
    artifact.check_target(out)
    folder = out.absolute().with_name(out.absolute().name + ".training")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"--out {out}: {folder} cannot be written ({error.strerror}); choose another place") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"--out {out}: another deformer-train is at work in {folder}; wait or choose another name"
            ) from None
        yield folder


def _earlier_run(folder: Path, settings: Everything) -> dict[str, Any] | None:
    state = checkpoint.load_state(folder)
    if state is not None and not settings.resume:
        raise ConfigError(
            f"{folder} holds an interrupted run (step {state['step']} of {state['steps']}): "
            f"add --resume to continue it, or delete the folder to start anew"
        )
    return state


def _data_options(settings: Everything) -> DataOptions:
    return DataOptions(
        layout=settings.layout,
        label=settings.label,
        normal=settings.normal,
        exclude=names(settings.exclude),
        context=names(settings.context),
        discrete=names(settings.discrete),
        continuous=names(settings.continuous),
        calibration_share=settings.calibration_share,
        seed=settings.seed,
    )


def model_config(settings: Everything) -> ModelConfig:
    """The preset with what was set otherwise; the table decides about Gaussians and exemplars."""
    chosen = {f.name for f in fields(ModelConfig)} - {"gaussians", "exemplars"}
    given = {name: getattr(settings, name, None) for name in chosen}
    try:
        return replace(PRESETS[settings.preset], **{k: v for k, v in given.items() if v is not None})
    except ValueError as error:
        raise ConfigError(f"the model cannot be built: {error}; change the hyperparameters") from None


@dataclass(frozen=True, slots=True)
class _Defaults:
    """steps: how long a run is. batch: the largest, smaller tables take smaller ones. learning_rate: its peak.
    gaussians: most that may guide the network."""

    steps: int
    batch: int
    learning_rate: float
    gaussians: int = 16


_RECIPES = {
    "tiny": _Defaults(3000, 256, 3e-3),
    "small": _Defaults(4000, 128, 2e-3),
    "base": _Defaults(10_000, 256, 1e-3),
    "paper": _Defaults(100_000, 128, 1e-4, gaussians=0),
}


def choose_gaussians(settings: Everything) -> int:
    """The most Gaussians that may guide the network, 0 for none."""
    return _RECIPES[settings.preset].gaussians if settings.gaussians is None else settings.gaussians


def choose_recipe(settings: Everything, rows: int) -> Recipe:
    """The recipe for a table with so many training rows, with what was set otherwise."""
    base = _RECIPES[settings.preset]
    batch = settings.batch or int(np.clip(2 ** round(np.log2(max(rows, 1) / 32)), 64, base.batch))
    steps_per_epoch = max(1, rows // min(batch, rows))
    epochs = settings.epochs or max(1, round(base.steps / steps_per_epoch))
    recipe = Recipe(batch, base.learning_rate, epochs)
    given = {f.name: getattr(settings, f.name) for f in fields(Recipe) if f.name not in ("batch", "epochs")}
    return replace(recipe, **{k: v for k, v in given.items() if v is not None})


def choose_exemplars(settings: Everything) -> int:
    """The most records that the ranking of whole records may compare with, 0 for none."""
    return EXEMPLARS if settings.exemplars is None else settings.exemplars


def _new_model(data: Prepared, config: ModelConfig, guides: Guides | None, seed: int, device: torch.device) -> DEformer:
    torch.manual_seed(seed)
    model = DEformer(data.schema, config)
    if guides is not None:
        model.gaussians = guides.whole
        guides.folds.to(device)
    return model.to(device)


def _identity(settings: Everything, data: Prepared, config: ModelConfig, recipe: Recipe) -> dict[str, Any]:
    """What a run and its continuation share."""
    identity = {"the data's fingerprint": data.fingerprint, "seed": settings.seed, "max_time": settings.max_time}
    return identity | {k: list(v) if isinstance(v, tuple) else v for k, v in (asdict(config) | asdict(recipe)).items()}


def _costs(model: DEformer, data: Prepared, budget: Budget, order: Order) -> Costs:
    """What calibration and the held-out evaluation will take, from a few rows, and a second for the rest."""
    rows = data.rows(CALIBRATION)
    few = rows[:TIMED_ROWS]
    began = budget.clock()
    statistics(model, data, few, order, 0)
    middle = budget.clock()
    held_out(model, data, few, 1, 0)
    ended = budget.clock()
    scored = len(calibration_rows(rows, 0)) / len(few)
    evaluated = min(len(rows), HELD_OUT_ROWS) * HELD_OUT_ORDERS / len(few)
    after = 1.0 + 1.2 * ((middle - began) * scored + (ended - middle) * evaluated)  # a fifth for safety
    return Costs(after, (ended - middle) / len(few))


def _summary(
    settings: Everything, data: Prepared, recipe: Recipe, fitted: Fitted, held: HeldOut, budget: Budget, device: str
) -> dict[str, Any]:
    """The training summary of the manifest."""
    scored = max(1, int((~data.schema.context).sum()))
    options = settings.model_dump(mode="json", exclude_none=True)
    per_feature = {n: float(v) for n, v in zip(data.schema.names, held.per_feature, strict=True) if np.isfinite(v)}
    return {
        **data.summary(),
        "held_out": {
            "log_likelihood": -held.mean,
            "log_likelihood_per_feature": -held.mean / scored,
            "features": {name: -value for name, value in per_feature.items()},
            "records": len(held.nll),
            "orders": held.orders,
            "unit": "nats, normalised units",
        },
        "steps": fitted.steps,
        "epochs": round(fitted.epochs, 3),
        "stopped_early": fitted.stopped_early,
        "seconds": round(budget.elapsed, 1),
        "device": device,
        "seed": settings.seed,
        "recipe": asdict(recipe),
        "options": options,
        "history": fitted.history,
    }
