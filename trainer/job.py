"""A training run from tables to a model directory: prepare, fit, calibrate, evaluate, write."""

from __future__ import annotations

import fcntl
import math
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch

from deformer_stream import model_store
from deformer_stream.calibration.conformal import Calibration
from deformer_stream.errors import ConfigError
from deformer_stream.model.deformer import DEformer, ModelConfig
from deformer_stream.model.windows import Window
from trainer import checkpoint, finetune, gaussian_prior
from trainer.budget import Costs, TimeBudget
from trainer.calibrate import (
    build_calibration,
    choose_order,
    compute_statistics,
    sample_rows,
    score_calibration_records,
)
from trainer.data import DataOptions, PreparedTable, Split, prepare_table
from trainer.distributed import Ranks
from trainer.evaluate import HeldOutLikelihood, evaluate_held_out
from trainer.exemplars import MAX_REFERENCE_RECORDS, add_ranking
from trainer.fit import SINGLE_PROCESS, Recipe, TrainingResult, TrainingRun, TrainingStatus
from trainer.folds import split_folds
from trainer.gaussian_prior import CrossFittedPriors
from trainer.outliers import drop_outliers
from trainer.recipes import SHAPE, choose_exemplars, choose_gaussians, choose_recipe, model_config
from trainer.settings import TrainConfig, parse_periods, split_names

HELD_OUT_ROWS, HELD_OUT_ORDERS = 2000, 4
TIMED_ROWS = 64
SAFETY = 1.1
AFTER_SHARE, FEWEST_AFTER = 0.4, 500
"""Of a limited time, for calibration, ranking and evaluation; they look at so many records in any case."""
GUIDE_SHARE = 0.15
"""Of a limited time, when no more Gaussians are tried."""
FEWEST_STEPS = 20
"""With fewer the model is little more than its Gaussians, and that is said."""


@dataclass(frozen=True, slots=True)
class TrainingOutput:
    """What a finished run hands to report and summary."""

    directory: Path
    fingerprint: str
    data: PreparedTable
    model: DEformer
    training_result: TrainingResult
    calibration: Calibration
    held_out: HeldOutLikelihood
    summary: dict[str, Any]


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
    settings: TrainConfig,
    *,
    on_prepared: Callable[[PreparedTable], None] = lambda data: None,
    on_status: Callable[[TrainingStatus], None] = lambda status: None,
    on_message: Callable[[str], None] = lambda line: None,
    should_stop: Callable[[], bool] = lambda: False,
    budget: TimeBudget | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> TrainingOutput:
    """Run the whole of it. show: told the kinds. observe: told every step. say: told what happens, in words. peers: of
    which this process is the first; the others call `assist`.

    Raises errors of `deformer_stream.errors`, and `fit.Interrupted` when `stop` says so.
    """
    from trainer.report import render

    budget = budget or TimeBudget(settings.max_time)
    with _working_folder(settings.out) as folder:
        fit = _begin(tables, settings, folder, budget, ranks, on_prepared, on_message)
        data, order = fit.data, choose_order(settings.order, fit.data)
        fitted = _trained(fit, should_stop, on_status)
        if ranks.world_size > 1:
            budget.clock = fit.budget.clock = time.monotonic  # the others have done their part
        if fitted.steps < FEWEST_STEPS and budget.limit is not None:
            on_message(f"--max-time left next to no time to train (steps: {fitted.steps}); allow more")
        on_message("calibrating")
        rows = data.select_rows(Split.CALIBRATION)
        rows = sample_rows(rows, settings.seed + 2, math.ceil(fit.budget.share * len(rows)))
        found = score_calibration_records(fitted.model, data, rows, order, settings.seed)
        others = split_folds(data, settings.folds, settings.seed) if settings.folds else ()
        for number, fold in enumerate(others, 2):
            on_message(f"fold {number} of {settings.folds}")
            sibling = _trained(_sibling(fold, settings, number, folder, budget), should_stop).model
            found += score_calibration_records(sibling, fold, fold.select_rows(Split.CALIBRATION), order, settings.seed + number)
        calibration = build_calibration(found, data.schema, order, settings.contamination, data.ties)
        model = add_ranking(fitted.model, data, choose_exemplars(settings), settings.seed)
        held = evaluate_held_out(
            fitted.model,
            data,
            sample_rows(rows, settings.seed, math.ceil(fit.budget.share * HELD_OUT_ROWS)),
            HELD_OUT_ORDERS,
            settings.seed + 1,
        )
        training = _summary(settings, data, fit.recipe, fitted, held, budget, str(model.device))
        page = render(data, fitted, calibration, held, training)
        fingerprint = model_store.write(settings.out, model, calibration, training, page)
        shutil.rmtree(folder)
    return TrainingOutput(settings.out, fingerprint, data, model, fitted, calibration, held, training)


def run_worker_rank(
    tables: Sequence[Path], settings: TrainConfig, stop: Callable[[], bool], budget: TimeBudget, peers: Ranks
) -> None:
    """The part of a process that is not the first of several: it trains along and writes nothing that lasts."""
    with tempfile.TemporaryDirectory() as name:
        _trained(_begin(tables, settings, Path(name), budget, peers), stop)


def _trained(
    fit: TrainingRun, stop: Callable[[], bool], observe: Callable[[TrainingStatus], None] = lambda status: None
) -> TrainingResult:
    return fit.run(stop, observe, lambda model: _costs(model, fit.data, fit.budget))


def _begin(
    tables: Sequence[Path],
    settings: TrainConfig,
    folder: Path,
    budget: TimeBudget,
    peers: Ranks,
    show: Callable[[PreparedTable], None] = lambda data: None,
    say: Callable[[str], None] = lambda line: None,
) -> TrainingRun:
    """The training run, new or where it was interrupted. folder: for the encoded table."""
    kept = _folder_of(settings.out)
    state = _earlier_run(kept, settings)
    old = _old_model(settings)
    data = drop_outliers(prepare_table(tables, _data_options(settings, old), folder), settings.contamination, settings.seed)
    show(data)
    choose_order(settings.order, data)  # what cannot be is said before anything is trained
    fit = _fit(data, settings, kept, _part(budget, settings.folds or 1), old, state, peers)
    if state is not None:
        fit.restore(state)
        say(f"continuing at step {fit.step} of {fit.steps}")
    elif settings.resume:
        say(f"nothing to resume in {kept}: starting from the beginning")
    return fit


def _fit(
    data: PreparedTable,
    settings: TrainConfig,
    folder: Path,
    budget: TimeBudget,
    old: DEformer | None,
    state: dict[str, Any] | None = None,
    peers: Ranks = SINGLE_PROCESS,
) -> TrainingRun:
    """Everything that training needs, before its first step. old: a model to adapt. state: of an earlier life."""
    device = peers.choose_device(model_store.resolve_device(settings.device))
    recipe = choose_recipe(settings, int((data.split == Split.TRAIN).sum()))
    torch.manual_seed(settings.seed)
    if old is not None:
        model, guides = _adapted_model(old, data, settings.seed)
    else:
        most, hurry = choose_gaussians(settings), lambda: budget.beyond(GUIDE_SHARE)
        if state is not None:  # as many as before, whatever the time
            most, hurry = state["identity"]["gaussians"], lambda: False
        guides = gaussian_prior.fit_priors(data, most, settings.seed, hurry)
        config = model_config(settings, data.schema.has_repeating_sensors)
        model = DEformer(data.schema, replace(config, gaussians=guides.num_components if guides else 0))
    if guides is not None:
        model.gaussians = guides.full
        guides.by_fold.to(device)
    model = model.to(device)
    identity = _identity(settings, data, model.config, recipe) | {"processes": peers.world_size}
    return TrainingRun(data, model, recipe, settings.seed, folder, budget, identity, guides, peers)


def _sibling(fold: PreparedTable, settings: TrainConfig, number: int, folder: Path, budget: TimeBudget) -> TrainingRun:
    """Training as the first model's, on the other records of a fold (`trainer.folds`). It is not resumed."""
    own = folder / f"fold-{number}"
    own.mkdir(exist_ok=True)
    left = _part(budget, (settings.folds or 1) + 1 - number)
    return _fit(fold, settings.model_copy(update={"seed": settings.seed + number}), own, left, _old_model(settings))


def _part(budget: TimeBudget, parts: int) -> TimeBudget:
    """Of the time that is left, one of so many equal parts."""
    if parts == 1 or budget.limit is None:
        return budget
    return TimeBudget(max(0.0, budget.limit - budget.elapsed) / parts, budget.clock)


@contextmanager
def _working_folder(out: Path) -> Iterator[Path]:
    """`DIR.training`, held by this process alone. It stays where a run is interrupted that can be resumed."""
    model_store.check_output_directory(out)
    folder = _folder_of(out)
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
        try:
            yield folder
        finally:
            if folder.exists() and not (folder / checkpoint.FILE_NAME).exists():
                shutil.rmtree(folder)


def _folder_of(out: Path) -> Path:
    return out.absolute().with_name(out.absolute().name + ".training")


def _earlier_run(folder: Path, settings: TrainConfig) -> dict[str, Any] | None:
    state = checkpoint.load_state(folder)
    if state is not None and not settings.resume:
        raise ConfigError(
            f"{folder} holds an interrupted run (step {state['step']} of {state['steps']}): "
            f"add --resume to continue it, or delete the folder to start anew"
        )
    return state


def _data_options(settings: TrainConfig, old: DEformer | None) -> DataOptions:
    return DataOptions(
        layout=settings.layout,
        label=settings.label,
        normal=settings.normal,
        exclude=split_names(settings.exclude),
        context=split_names(settings.context),
        discrete=split_names(settings.discrete),
        continuous=split_names(settings.continuous),
        cycle=parse_periods(settings.cycle),
        calibration_share=1 / settings.folds if settings.folds else settings.calibration_share,
        seed=settings.seed,
        window=Window(round(settings.window * 1e6), settings.slots or 1) if settings.window is not None else None,
        once=split_names(settings.once),
        base=old.schema if old is not None else None,
        ties=settings.ties,
    )


def _old_model(settings: TrainConfig) -> DEformer | None:
    """What --init-from names. Raises ConfigError where the model is asked to be another one."""
    if settings.init_from is None:
        return None
    for name in ("gaussians", *SHAPE):
        if getattr(settings, name, None) is not None:
            raise ConfigError(f"--init-from: {name} is that of the model in {settings.init_from}; leave it out")
    return model_store.read(settings.init_from).model.train()


def _adapted_model(old: DEformer, data: PreparedTable, seed: int) -> tuple[DEformer, CrossFittedPriors | None]:
    guides = finetune.adapt_priors(old.gaussians, data, len(old.schema), seed) if old.gaussians is not None else None
    model = finetune.extend_model(old, data.schema)
    model.ranking = old.ranking  # until the exemplars of this table join them
    return model, guides


def _identity(settings: TrainConfig, data: PreparedTable, config: ModelConfig, recipe: Recipe) -> dict[str, Any]:
    """What a run and its continuation share."""
    fleet = None if settings.init_from is None else model_store.read_manifest(settings.init_from)["fingerprint"]
    identity = {"the model of --init-from": fleet, "the data's fingerprint": data.fingerprint}
    identity |= {"seed": settings.seed, "max_time": settings.max_time}
    return identity | {k: list(v) if isinstance(v, tuple) else v for k, v in (asdict(config) | asdict(recipe)).items()}


def _costs(model: DEformer, data: PreparedTable, budget: TimeBudget) -> Costs:
    """What calibration, ranking and the held-out evaluation will take, from a few rows, and a second for the rest.

    Where that is more than `AFTER_SHARE` of a limited time, they look at fewer records."""
    rows = data.select_rows(Split.CALIBRATION)
    few = rows[:TIMED_ROWS]
    began = budget.clock()
    compute_statistics(model, data, few, choose_order(None, data), 0)  # any order takes as long
    middle = budget.clock()
    evaluate_held_out(model, data, few, 1, 0)
    ended = budget.clock()
    scored = len(sample_rows(rows, 0)) + min(len(rows), MAX_REFERENCE_RECORDS)
    evaluated = min(len(rows), HELD_OUT_ROWS) * HELD_OUT_ORDERS
    seconds = SAFETY * ((middle - began) * scored + (ended - middle) * evaluated) / len(few)
    share = 1.0
    if budget.limit is not None and seconds > AFTER_SHARE * budget.limit:
        share = min(1.0, max(AFTER_SHARE * budget.limit / seconds, FEWEST_AFTER / len(rows)))
    return Costs(1.0 + share * seconds, (ended - middle) / len(few), share)


def _summary(
    settings: TrainConfig,
    data: PreparedTable,
    recipe: Recipe,
    fitted: TrainingResult,
    held: HeldOutLikelihood,
    budget: TimeBudget,
    device: str,
) -> dict[str, Any]:
    """The training summary of the manifest."""
    scored = max(1, int((~data.schema.is_context).sum()))
    options = settings.model_dump(mode="json", exclude_none=True)
    per_feature = {n: float(v) for n, v in zip(data.schema.names, held.nll_by_feature, strict=True) if np.isfinite(v)}
    return {
        **data.summarize(),
        "held_out": {
            "log_likelihood": -held.mean_nll,
            "log_likelihood_per_feature": -held.mean_nll / scored,
            "features": {name: -value for name, value in per_feature.items()},
            "records": len(held.nll_by_record),
            "orders": held.num_orders,
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
